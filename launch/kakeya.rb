# A formula for a tap of your own; docs/howto/install.md fills in the two words in capitals.
class Kakeya < Formula
  desc "Run language models for agents on a shelf of Mac minis"
  url "KAKEYA_TARBALL"
  sha256 "KAKEYA_SHA256"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  def install
    # Wheels from PyPI: mlx cannot be built from source in a formula.
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/pip", "install", buildpath
    bin.install_symlink libexec/"bin/kakeya", libexec/"bin/kakeya-node"
  end

  def caveats
    <<~TEXT
      Have macOS start a node with the machine, as your user:
        sudo #{opt_bin}/kakeya service install
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/kakeya version --data-dir #{testpath}")
  end
end

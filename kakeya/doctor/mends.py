"""Commands that mend faults, and words that the checks share.

No command was tried on a Mac; the commands for macOS are from Apple's manuals.
"""

from __future__ import annotations

from kakeya.doctor.report import shell

LOCAL_NETWORK = (
    "System Settings > Privacy & Security > Local Network must allow the program that starts "
    "kakeya-node: iTerm, an editor, or python for a launchd agent (Terminal, ssh and a launchd "
    "daemon need no permission)"
)
OPEN_LOCAL_NETWORK = shell(
    "open", "x-apple.systempreferences:com.apple.preference.security?Privacy_LocalNetwork"
)
JOIN = "kakeya join TOKEN"
UPDATE = "git pull"


def is_mac(platform: str) -> bool:
    """Whether a platform is macOS: `darwin` or `darwin-arm64`."""
    return platform.startswith("darwin")


def open_port(platform: str, port: str, python: str = "") -> str:
    """Return the command that opens a port of a machine's firewall; `python` "" = unknown."""
    if is_mac(platform):
        program = python or "PATH_OF_ITS_PYTHON"
        tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
        return shell("sudo", tool, "--add", program, "--unblockapp", program)
    return shell("sudo", "ufw", "allow", f"{port}/tcp")


def set_clock(platform: str) -> str:
    """Return the command that sets a clock by the network."""
    if is_mac(platform):
        return "sudo sntp -sS time.apple.com"
    return "sudo timedatectl set-ntp true"


def show_route(platform: str, host: str) -> str:
    """Return the command that shows the route to a host."""
    if is_mac(platform):
        return shell("route", "-n", "get", host)
    return shell("ip", "route", "get", host)


def show_link(platform: str, name: str) -> str:
    """Return the command that shows whether an interface has a carrier."""
    return shell("ifconfig", name) if is_mac(platform) else shell("ip", "link", "show", name)


def show_listener(port: str) -> str:
    """Return the command that shows the program that has a port."""
    return shell("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN")


def span(seconds: float) -> str:
    """Write a duration for people."""
    for unit_s, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"

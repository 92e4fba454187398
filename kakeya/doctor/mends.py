"""The commands that mend things, and the words that the checks share.

Nothing here was run on a Mac; the Mac's commands are from Apple's manuals.
"""

from __future__ import annotations

from kakeya.doctor.report import shell

LOCAL_NETWORK = (
    "System Settings > Privacy & Security > Local Network must allow the program that starts "
    "kakeya-node (Terminal, iTerm or python)"
)
OPEN_LOCAL_NETWORK = shell(
    "open", "x-apple.systempreferences:com.apple.preference.security?Privacy_LocalNetwork"
)
JOIN = "kakeya join TOKEN"
UPDATE = "git pull"


def is_mac(platform: str) -> bool:
    """Whether `darwin` or `darwin-arm64` is meant."""
    return platform.startswith("darwin")


def open_port(platform: str, port: str, python: str = "") -> str:
    """Let calls through a machine's own firewall; `python` "" = not known here."""
    if is_mac(platform):
        program = python or "PATH_OF_ITS_PYTHON"
        tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
        return shell("sudo", tool, "--add", program, "--unblockapp", program)
    return shell("sudo", "ufw", "allow", f"{port}/tcp")


def set_clock(platform: str) -> str:
    """Set a clock by the network."""
    if is_mac(platform):
        return "sudo sntp -sS time.apple.com"
    return "sudo timedatectl set-ntp true"


def show_route(platform: str, host: str) -> str:
    """Show which way calls to a host would go."""
    if is_mac(platform):
        return shell("route", "-n", "get", host)
    return shell("ip", "route", "get", host)


def show_listener(port: str) -> str:
    """Show which program has a port."""
    return shell("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN")


def span(seconds: float) -> str:
    """Write a duration for people."""
    for unit_s, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"

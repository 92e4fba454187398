"""The module of macOS's Python by which `urllib` asks for the system's proxies: there are none."""


def _get_proxy_settings() -> dict[str, object]:
    return {}


def _get_proxies() -> dict[str, str]:
    return {}

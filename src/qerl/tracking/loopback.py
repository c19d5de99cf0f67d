"""Protect a server on a loopback address against DNS rebinding.

A web page can reach a loopback address through a host name of its own that resolves to it; the Host header
then contains that name.
"""

import ipaddress
from urllib.parse import urlsplit


def names_this_machine(host_header: str, address: str = "localhost") -> bool:
    """True if the Host header is a loopback address, `localhost` or the address the server listens on."""
    try:
        name = urlsplit(f"//{host_header}").hostname or ""
        return name in ("localhost", address) or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

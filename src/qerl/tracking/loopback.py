"""Whether a request that bears no key was meant for this machine.

A page in a browser can send requests to a loopback address, by a name of its own that it lets point there
(DNS rebinding); the Host header then has that name.
"""

import ipaddress
from urllib.parse import urlsplit


def names_this_machine(host_header: str, own: str = "localhost") -> bool:
    """Whether it has a loopback address, `localhost` or the address that the server listens on."""
    try:
        name = urlsplit(f"//{host_header}").hostname or ""
        return name in ("localhost", own) or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

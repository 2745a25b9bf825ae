"""Check the addresses that ranks may meet at: one host's own, never all addresses of a host, nor those of many hosts.

A store that listens on 0.0.0.0 can be reached from every network of its host, and the system's libraries read an empty
name, "0" and "::" as that. So such a name is refused here when it is read, before any rank waits.
"""

import errno
import ipaddress
import re
import socket

from megazero.base.errors import UserError

_SHOWN = 40  # characters of a value that an error shows
_LABEL, _NAME = 63, 253  # characters of a name's label, and of the whole (RFC 1035, section 2.3.4)
_HIGHEST_PORT = 65535
_DISCARD = 9  # any port does: nothing is sent there


def shown(text: str) -> str:
    """Return a value as an error shows it: printable, and not too long."""
    printable = "".join(c if c.isprintable() else "?" for c in text[: _SHOWN + 1])
    return printable if len(printable) <= _SHOWN else f"{printable[:_SHOWN]}… ({len(text):,} characters)"


def number(name: str, text: str, do: str) -> int:
    """Return the number that a variable holds: ASCII digits, as few as a number of 64 bits has.

    Raises:
        UserError: 111, it is none.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UserError(111, f"{name} is {shown(text) or 'empty'}, expected a number", do)
    return int(text)


def port(name: str, text: str) -> int:
    """Return the port that a variable holds.

    Raises:
        UserError: 111, it is none, or one that no process can listen on.
    """
    found = number(name, text, "set MASTER_ADDR and MASTER_PORT")
    if not 1 <= found <= _HIGHEST_PORT:
        raise UserError(
            111, f"expected {name} in 1 to {_HIGHEST_PORT}, got {shown(text)}", f"set {name} to a free port"
        )
    return found


def host(name: str, text: str) -> str:
    """Return the host that a variable names, unchanged.

    A name that cannot be resolved now is let through: the code that listens or connects tries again and reports it.

    Raises:
        UserError: 111, it is no name, or means all addresses of a host, or those of many hosts.
    """
    if fault := _fault(text):
        raise UserError(
            111, f"{name} is {shown(text) or 'empty'}: {fault}", f"set {name} to rank 0's host name or address"
        )
    return text


def resolved(text: str) -> list[tuple[int, str]]:
    """Return the families and addresses of a host, IPv4 first. Raises OSError: it has none."""
    try:
        found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"no host name: {error}") from None
    addresses = dict.fromkeys((int(family), str(address[0])) for family, *_, address in found)
    return sorted(addresses, key=lambda pair: pair[0] != socket.AF_INET)


def _fault(text: str) -> str:
    """Return why ranks cannot meet at a host; "" if they can, as far as is known."""
    if not text.strip():
        return "that would be all addresses of a host"
    if not re.fullmatch(r"[!-~]+", text):
        return "expected a name of ASCII letters without blanks"
    if len(text) > _NAME or any(len(label) > _LABEL for label in text.split(".")):
        return f"a name has at most {_NAME} characters, {_LABEL} between dots"
    try:
        addresses = resolved(text)
    except OSError:
        return ""
    return next(filter(None, (_fault_of_address(address) for _, address in addresses)), "")


def _fault_of_address(text: str) -> str:
    address = ipaddress.ip_address(text.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or (address.version == 4 and address.packed[0] == 0):
        return "that is all addresses of a host"
    if address.is_multicast:
        return "that is a multicast address, of many hosts"
    if _is_broadcast(str(address)):
        return "that is a broadcast address, of many hosts"
    return "that address is reserved" if address.is_reserved and address.version == 4 else ""


def _is_broadcast(address: str) -> bool:
    """Return whether the kernel knows it as a broadcast address: then it refuses an ordinary datagram socket."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD))  # nothing is sent
        except PermissionError:
            return True
        except OSError:  # no route there from here
            return False
    return False

"""Find out whether the GraphQL server behind a URL answers at all within a second.

A socket time-out does not bound this time: it starts anew for every address and every read, and does not cover the name
lookup, which may take half a minute. So the request is sent in a thread of its own, and its answer waited for with one
deadline. The thread is a daemon: a request without an answer does not delay the exit.

The request is the smallest query there is, posted to the real ones' address: a front end that answers while the service
behind it hangs is a dead server too. Any answer below 500 counts (it may well refuse us), as does a failed TLS
handshake: a server exists, and the library that connects next knows how to talk to it. Proxies are taken from the
environment by the standard library.
"""

import ssl
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from threading import Thread
from urllib.parse import urlsplit

PROBE_SECONDS = 1.0
QUERY = b'{"query": "query { __typename }"}'


class Probe:
    """A request to the server at a base URL, sent in the background from its construction on."""

    def __init__(self, base_url: str):
        self._url = base_url.rstrip("/") + "/graphql"
        self._alive = False
        self._deadline = time.monotonic() + PROBE_SECONDS
        self._thread = Thread(target=self._ask, name="probe", daemon=True)
        self._thread.start()

    def answered(self) -> bool:
        """Return whether it answered within PROBE_SECONDS of the start; wait no longer than that."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        return self._alive

    def _ask(self) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            question = urllib.request.Request(self._url, data=QUERY, headers=headers, method="POST")
            with urllib.request.urlopen(question, timeout=PROBE_SECONDS):
                self._alive = True
        except urllib.error.HTTPError as error:
            self._alive = error.code < 500
        except urllib.error.URLError as error:
            self._alive = isinstance(error.reason, ssl.SSLError)
        except (OSError, HTTPException, ValueError):
            self._alive = False


def host_of(url: str) -> str:
    """Return host and port of a URL, without the user and password that it may carry."""
    parts = urlsplit(url)
    return (parts.hostname or url) + (f":{parts.port}" if parts.port else "")

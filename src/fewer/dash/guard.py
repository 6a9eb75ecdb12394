"""Who may ask: no other site through the user's browser, and from other machines only who has the token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fewer.errors import SettingError

SHORTEST = 16
"""Characters of a token."""
OPEN = ("/", "/api/enter")
"""What is answered without a token, besides the files of the page: there is nothing of a run in them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host == "localhost" or (_is_number(host) and ipaddress.ip_address(host).is_loopback)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def token_for(host: str, file: Path | None) -> str | None:
    """The token that is asked for: that of the file, or a new one where other machines can ask; else none."""
    if file is None:
        return None if is_loopback(host) else secrets.token_urlsafe(32)
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--token-file {file} cannot be read: {error}") from error
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingError(f"--token-file {file}: a token is {SHORTEST} or more letters and digits, in one line")
    return token


class Guard:
    """Stands before the application."""

    def __init__(self, app: ASGIApp, token: str | None, names: Collection[str], port: int) -> None:
        self.app = app
        self.token = token
        self.names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}
        self.cookie = f"fewer-dash-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer only whom we know."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, "content-security-policy": POLICY}.items():
                    sent.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], headers)
        app = JSONResponse({"error": refusal[1]}, refusal[0]) if refusal else self.app
        await app(scope, receive, send_with)

    def _refusal(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._ours(host):  # a foreign name that was made to point here
            return 421, "this address is not one of this dashboard (--name NAME adds one)"
        if method not in ("GET", "HEAD") and not _same(headers.get("origin", ""), host):
            return 403, "asked by another site"
        if self.token is not None and path not in OPEN and not path.startswith("/static/") and not self._knows(headers):
            return 401, "the token is missing"
        return None

    def _ours(self, host: str) -> bool:
        """Whether an address is ours: a number, which no other site can have as its name, or a name that we know."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.names or _is_number(name)

    def _knows(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self.accepts(given)
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.proof().encode())

    def accepts(self, given: str) -> bool:
        """Whether this is the token; takes as long for a nearly right one as for any other."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def proof(self) -> str:
        """What the browser keeps instead of the token."""
        return hmac.new((self.token or "").encode(), b"fewer dash", hashlib.sha256).hexdigest()


def _same(origin: str, host: str) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False

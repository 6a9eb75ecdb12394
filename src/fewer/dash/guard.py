"""Access control: refuses requests from other sites, and requires a token from other machines."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fewer.errors import SettingError

MIN_TOKEN_LENGTH = 16
PUBLIC_PATHS = ("/", "/api/login")
"""Paths that need no token, in addition to the static files; they reveal nothing about runs."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    return host == "localhost" or (_is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def choose_token(host: str, file: Path | None) -> str | None:
    """Returns the required token: from the file, or a new one if other machines can connect; otherwise None."""
    if file is None:
        return None if is_loopback(host) else secrets.token_urlsafe(32)
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read --token-file {file}: {error}") from error
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingError(f"--token-file {file} must hold one line with {MIN_TOKEN_LENGTH} or more letters and digits")
    return token


class Guard:
    """ASGI middleware that checks every request and adds security headers to every response."""

    def __init__(self, app: ASGIApp, token: str | None, names: Collection[str], port: int) -> None:
        self.app = app
        self.token = token
        self.names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}
        self.cookie_name = f"fewer-dash-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes allowed requests on and refuses the others."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    response_headers.setdefault(name, value)
            await send(message)

        refusal = self._check(scope["method"], HTTPConnection(scope))
        app = JSONResponse({"error": refusal[1]}, refusal[0]) if refusal else self.app
        await app(scope, receive, send_with_headers)

    def _check(self, method: str, request: HTTPConnection) -> tuple[int, str] | None:
        """Status and message of a refusal; None if the request is allowed."""
        path, host = request.scope["path"], request.headers.get("host", "")
        if not self._is_own_host(host):  # prevents DNS rebinding
            return 421, "this dashboard does not have this address (add it with --name NAME)"
        if method not in ("GET", "HEAD") and not _is_same_origin(request.headers.get("origin", ""), host):
            return 403, "the request comes from another site"
        is_public = path in PUBLIC_PATHS or path.startswith("/static/")
        if self.token is not None and not is_public and not self._is_logged_in(request):
            return 401, "the token is missing"
        return None

    def _is_own_host(self, host: str) -> bool:
        """True for a known name, and for an IP address, which no other site can use as its name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.names or _is_ip_address(name)

    def _is_logged_in(self, request: HTTPConnection) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.accepts(token)
        return hmac.compare_digest(request.cookies.get(self.cookie_name, "").encode(), self.cookie_value().encode())

    def accepts(self, token: str) -> bool:
        """True if this is the token, compared in constant time."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def cookie_value(self) -> str:
        """What the browser stores instead of the token."""
        return hmac.new((self.token or "").encode(), b"fewer dash", hashlib.sha256).hexdigest()


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False

"""HTTP servers and handlers that keep to themselves: standard error belongs to others."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer


class QuietServer(ThreadingHTTPServer):
    """Answers in threads, and says nothing."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind, and ask no name server for the host's name: one that is down takes 10 s."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that send garbage, or leave in the middle."""


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with texts."""

    def answer(self, code: int, kind: str, text: str) -> None:
        """Send a whole answer of that content type."""
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: probes come every few seconds."""

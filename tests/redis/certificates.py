"""Certificates for servers and clients with TLS, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """A CA, and a certificate for 127.0.0.1 that serves both ends."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Made in the folder, good for two days."""
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    ca_key, request = folder / "ca.key", folder / "request.pem"
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", made.ca, "-subj", "/CN=ca",
             "-days", 2)  # fmt: skip
    _openssl("req", *new_key, "-keyout", made.key, "-out", request, "-subj", "/CN=redis")
    _openssl("x509", "-req", "-in", request, "-CA", made.ca, "-CAkey", ca_key, "-CAcreateserial",
             "-out", made.cert, "-days", 2, "-extfile", extensions)  # fmt: skip
    return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

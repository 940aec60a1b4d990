"""The payload that `makara up` sends to the manager's VM: this installation of Makara, and the settings."""

from __future__ import annotations

import io
import json
import zipfile
from importlib.metadata import entry_points

from ..boot.payload import ROOMS, build_wheel, is_installed, needs_of, payload, pinned, torch_version

_EXTRAS = ("azure", "fast")
_DATA = ("manager/page/*", "deploy/*.service")


def payload_of(clouds: str, owner: dict[str, str]) -> bytes:
    """A zip file. `clouds`: the text of clouds.yaml; `owner`: as `founding.found` takes it."""
    extras = [extra for extra in _EXTRAS if all(is_installed(need.name) for need in needs_of(extra))]
    made = {**owner, "torch": torch_version(None), "extras": extras}
    parts = {
        payload().wheel: manager_wheel(),
        "constraints.txt": pinned([need for extra in ("", *extras) for need in needs_of(extra)]),
        "clouds.yaml": clouds.encode(),
        "manager.json": json.dumps(made).encode(),
    }
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return raw.getvalue()


def manager_wheel() -> bytes:
    """A wheel of everything except the examples."""
    plain = {str(need) for need in needs_of()}
    lines = [f"Requires-Dist: {need}\n" for need in sorted(plain)]
    for extra in _EXTRAS:
        more = {str(need).partition(";")[0].strip() for need in needs_of(extra)} - plain
        lines.append(f"Provides-Extra: {extra}\n")
        lines += [f'Requires-Dist: {need}; extra == "{extra}"\n' for need in sorted(more)]
    return build_wheel(
        (*ROOMS, "manager", "deploy"), "".join(lines), _DATA, {"entry_points.txt": _programs()}
    )


def _programs() -> str:
    found = entry_points(group="console_scripts", name="makara")
    return "[console_scripts]\n" + "".join(f"{one.name} = {one.value}\n" for one in set(found))

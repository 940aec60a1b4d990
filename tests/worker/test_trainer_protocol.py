"""What trainers say to each other has the form of `TRAINER_PROTOCOL`: another form is another number."""

from __future__ import annotations

import json

from makara.checkpoint import CheckpointPart, Receipt
from makara.morphing import MemberState
from makara.morphing.in_flight import Parcel, parcels_from_json, parcels_to_json
from makara.pipeline.contributions import Pairs
from makara.protocol.messages import TRAINER_PROTOCOL, CheckpointRef
from makara.worker.execution.commit import CommitRecord, Flag
from makara.worker.execution.communicator import _packed, _unpacked
from pydantic import TypeAdapter


def test_what_members_tell_each_other_has_the_form_of_their_protocol() -> None:
    """Trainers of one protocol must read each other: another form is another number."""
    assert TRAINER_PROTOCOL == 13
    stored = b"c$}+NDlSPaP_j}muLS@WlLLw"
    assert _unpacked(stored) == {"step": 7}
    assert _unpacked(_packed({"step": 7}).encode()) == {"step": 7}


def test_records_and_states_are_sent_field_by_field() -> None:
    """They are sent as they are declared, so that a field of another name is another form."""
    record = CommitRecord(2, 6, 0, 3, 2, Flag.SAVE | Flag.HOLD, (0.5,))
    assert record.to_json() == {
        "generation": 2,
        "step": 6,
        "attempt": 0,
        "voters": 3,
        "prepared": 2,
        "flags": 6,
        "norms": [0.5],
    }
    state = MemberState(6, record.proof, 7, frozenset({3}), (2, 0), 1, 1)
    assert TypeAdapter(MemberState).dump_python(state, mode="json") == {
        "applied_step": 6,
        "record": {"num_steps": 7, "attempt": 0, "generation": 2},
        "reduced_step": 7,
        "sections": [3],
        "reduced_by": [2, 0],
        "branch": 1,
        "agreed_in": 1,
        "void_until": 0,
    }


def test_partial_sums_are_shown_with_their_tallies() -> None:
    parcel = Parcel(6, 2, 0, "s", Pairs((1, 4), (5, 5)), 9)
    told = {"rows": ["5"], "parcels": [[6, 2, 0, "s", (1, 4), [0, 0], 9]]}
    assert parcels_to_json([parcel]) == told
    assert parcels_from_json(json.loads(json.dumps(told))) == [parcel]


def test_receipts_are_sent_with_their_part() -> None:
    part = CheckpointPart(0, 1, "job/part", 8, "0" * 64, ("weights/a",))
    receipt = Receipt(CheckpointRef(step=7, generation=2), 2, part, {"scale": 0.5})
    assert json.loads(receipt.to_bytes()) == {
        "checkpoint": {"step": 7, "generation": 2},
        "num_parts": 2,
        "part": {
            "section": 0,
            "part": 1,
            "key": "job/part",
            "size_bytes": 8,
            "sha256": "0" * 64,
            "tensors": ["weights/a"],
        },
        "metadata": {"scale": 0.5},
    }

"""What the process of one message imports: Flower starts one for every message to a client."""

import json
import subprocess
import sys

import pytest

from fedagrac.flower.app import write_app

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

PROGRAM = """
import json, sys
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

for name in ("_run_id", "_node_id", "_task_id"):
    setattr(TaskIdentity, name, 7)
sys.path.insert(0, sys.argv[1])
from my_app.client_app import app

kind, kept = sys.argv[2], json.loads(sys.argv[3])
config = {"clients": 3, "algorithm.name": "fedagrac", "algorithm.lr": 0.1, "steps.kind": "client"}
context = Context(7, 5, {"partition-id": 2}, RecordDict(), config)
context.state["fedagrac-first"] = ConfigRecord(kept)
context.state["fedagrac-first-vector"] = ArrayRecord({"first": Array(np.arange(650.0))})
facts = ConfigRecord({"round": 4, "protocol": 1})
content = RecordDict({"facts": facts, "vectors": ArrayRecord({})})
message = Message(content, 5, kind, group_id="1", ttl=60.0)
message.metadata.__dict__["_message_id"] = "0" * 64
try:
    reply = app(message, context).content
    said = dict(reply["facts"])
    vectors = {name: array.numpy().tolist() for name, array in reply["vectors"].items()}
except Exception as error:
    said, vectors = {"error": str(error)}, {}
imported = [name for name in ("torch", "sklearn", "scipy", "pandas") if name in sys.modules]
print(json.dumps({"facts": said, "vectors": vectors, "imported": imported}))
"""


def exchanged(tmp_path, kind, **kept):
    """Return what the generated app answers in a process of its own, and what it imported."""
    app = write_app(tmp_path / "my-app")
    words = [sys.executable, "-c", PROGRAM, str(app), kind, json.dumps(kept)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_second_exchange_passes_on_what_was_kept_without_torch(tmp_path):
    said = exchanged(tmp_path, "train.first", run="7", round=4, client=2)
    assert said["facts"] == {"client": 2, "round": 4}
    assert said["vectors"] == {"first": [float(i) for i in range(650)]}
    assert said["imported"] == []


@pytest.mark.parametrize("kept", [{"run": "7", "round": 3, "client": 2}, {"run": "6", "round": 4, "client": 2}])
def test_a_gradient_of_another_round_or_run_is_not_passed_on(kept, tmp_path):
    said = exchanged(tmp_path, "train.first", **kept)
    assert said["facts"] == {"error": "this node has no first gradient of round 5"}
    assert said["vectors"] == {}


def test_a_greeting_imports_torch_and_no_other_large_library(tmp_path):
    said = exchanged(tmp_path, "query.hello")
    assert said["facts"]["client"] == 2
    assert said["facts"]["parameters"] == 650
    assert said["imported"] == ["torch"]

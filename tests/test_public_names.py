"""Reading a public name moves no random generator, and recording loads nothing heavy."""

import json
import subprocess
import sys

import leaveout as lo

PROGRAM = """
import json, os, random, sys
import numpy as np, torch

def states():
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()

def read(name):
    before = states()
    import leaveout
    getattr(leaveout, name)
    moved = [kind for kind, one, other in zip(("random", "numpy", "torch"), before, states()) if one != other]
    own = [module for module in sys.modules if module.split(".")[0] == "leaveout"]
    return moved, len(own), [module for module in HEAVY if module in sys.modules]

HEAVY = ("rich", "typer", "pandas", "sklearn", "scipy", "jinja2", "fsspec", "cloudpickle", "pooch")
found = {}
for name in json.loads(sys.argv[1]):
    end, start = os.pipe()
    if os.fork() == 0:  # a fresh process as far as leaveout is concerned
        try:
            os.write(start, json.dumps(read(name)).encode())
        finally:
            os._exit(0)
    os.close(start)
    os.wait()
    found[name] = json.loads(os.read(end, 1 << 16))
    os.close(end)
print(json.dumps(found))
"""


def read(names):
    """What each of these names does when it is the first one that a program reads."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(names)], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_no_random_generator_moves_when_a_public_name_is_read():
    names = [name for name in dir(lo) if not name.startswith("__")]
    homes = {lo._HOME_OF[name]: name for name in names}  # names of one module are read by importing the same
    found = read(list(homes.values()))
    assert {name: moved for name, (moved, *_) in found.items() if moved} == {}


def test_recording_loads_little():
    ((_, own, heavy),) = read(["Recorder"]).values()
    assert heavy == []
    assert own <= 60

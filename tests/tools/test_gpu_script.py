"""benchmarks/gpu.py without a GPU: its steps are stubs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu


def step(code, *needs, rows=None):
    return gpu.Step("a stub", lambda args: [sys.executable, "-c", code], needs, rows=rows)


STEPS = {
    "one": step("print('3 passed, 1 skipped in 0.10s')"),
    "two": step("print('========= ERROR SUMMARY: 4 errors'); raise SystemExit(9)"),
    "slow": step("import time; print('begun', flush=True); time.sleep(60)"),
    "lacks": step("", "no-such-tool"),
    "where": step("import os; print(os.environ['KVCOMPRESS_RESULTS'])"),
}


def run(out, *options, steps=STEPS):
    code = gpu.main([*options, "--out", str(out)], steps)
    return code, json.loads((out / "gpu.json").read_text())["steps"]


def test_runs_add_up(tmp_path):
    """Results of an earlier run are kept next to those of the next; repeated steps are replaced."""
    code, found = run(tmp_path, "--only", "one,where")
    assert code == 0 and [x["state"] for x in found.values()] == ["passed"] * 2
    assert (found["one"]["passed"], found["one"]["skipped"]) == (3, 1)
    assert found["where"]["tail"].strip() == str(tmp_path)
    code, found = run(tmp_path, "--only", "two")
    assert code == 1 and set(found) == {"one", "where", "two"}
    assert (found["two"]["state"], found["two"]["rc"], found["two"]["found"]) == ("failed", 9, 4)
    code, found = run(tmp_path, "--only", "two", steps={"two": step("")})
    assert code == 0 and found["two"]["state"] == "passed" and "found" not in found["two"]
    assert gpu.main(["--merge", str(tmp_path / "gpu.json"), "--out", str(tmp_path / "there")], STEPS) == 0
    assert json.loads((tmp_path / "there" / "gpu.json").read_text())["steps"] == found


def test_each_step_is_kept_as_soon_as_it_is_done(tmp_path):
    look = f"import json; print(list(json.load(open({str(tmp_path / 'gpu.json')!r}))['steps']))"
    found = run(tmp_path, steps={"one": STEPS["one"], "look": step(look)})[1]
    assert found["look"]["tail"].strip() == "['one']"


@pytest.fixture
def limit():
    """Seconds in which a Python process starts, whatever else runs on the machine."""
    start = time.time()
    subprocess.run([sys.executable, "-c", "import subprocess, pathlib"], check=True)
    return round(2 + 5 * (time.time() - start))


@pytest.mark.full
def test_a_cut_step_says_so(tmp_path, limit):
    code, found = run(tmp_path, "--only", "slow,one", "--limit", str(limit))
    assert code == 1 and (found["slow"]["state"], found["slow"]["cut after"]) == ("cut", limit)
    assert found["slow"]["seconds"] < limit + 30
    assert "begun" in found["slow"]["tail"] and found["one"]["state"] == "passed"


def gone(process):
    try:
        return "\nState:\tZ" in Path("/proc", process, "status").read_text()
    except OSError:
        return True


@pytest.mark.full
def test_what_a_cut_step_started_ends_too(tmp_path, limit):
    begun = tmp_path / "begun"
    inner = f"import os, time, pathlib; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(300)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert run(tmp_path, "--limit", str(limit), steps={"x": step(outer)})[1]["x"]["state"] == "cut"
    end = time.time() + 30
    while time.time() < end and not gone(begun.read_text()):
        time.sleep(0.1)
    assert gone(begun.read_text())


def test_a_step_that_shows_nothing_has_not_passed(tmp_path):
    """A profile without kernels, or a test run without tests."""
    none = gpu.Step("", lambda args: [*gpu.PYTEST, "--collect-only", "tests/tools/test_gpu_script.py"])
    steps = {"profile": step("print('==ERROR== no counters')", rows=gpu.ncu_rows), "tests": none}
    code, found = run(tmp_path, steps=steps)
    assert code == 1 and [x["state"] for x in found.values()] == ["failed"] * 2


def test_packages_of_the_callers_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = run(tmp_path, steps={"x": step("import sys; print(sys.path)")})[1]
    assert "'/elsewhere'" in found["x"]["tail"]


def test_a_missing_tool_and_too_little_time(tmp_path, capsys):
    code, found = run(tmp_path, "--only", "lacks")
    assert code == 1 and found["lacks"]["state"] == "missing" and found["lacks"]["missing"] == ["no-such-tool"]
    code, found = run(tmp_path, "--only", "one", "--total", "3")
    assert code == 1 and "one" not in found and "one: not begun" in capsys.readouterr().out


def test_a_rehearsal_runs_what_the_host_can(tmp_path):
    """It writes to a separate file; a library that was built elsewhere is used, with or without nvcc."""
    device = step("import os; print(os.environ['KVCOMPRESS_TEST_DEVICE'])")._replace(environment=gpu.on_gpu)
    code = gpu.main(["--rehearse", "--out", str(tmp_path)], {"a": device._replace(host=True), "b": device})
    found = json.loads((tmp_path / "rehearsal.json").read_text())["steps"]
    assert code == 1 and found["a"]["tail"].strip() == "cpu" and found["b"]["missing"] == ["a GPU"]
    assert run(tmp_path, steps={"a": device})[1]["a"]["tail"].strip() == "cuda"
    made = gpu.Step("", lambda args: ["cat", *gpu.build(args)[1:3]], ("nvcc",))
    for name, text in (("_C.abi3.so", "one, "), ("libkvcompress_cuda.so", "two")):
        (tmp_path / name).write_text(text)
    assert run(tmp_path, "--prebuilt", str(tmp_path), steps={"build": made})[1]["build"]["tail"] == "one, two"


def test_unknown_steps_are_refused(tmp_path, capsys):
    for option in ("--only", "--skip"):
        with pytest.raises(SystemExit):
            gpu.main([option, "one,three", "--out", str(tmp_path)], STEPS)
        assert "expected some of one, two, slow, lacks, where; got three" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", gpu.STEPS)
def test_real_steps_name_files_that_exist(name, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--help"])
    assert f"  {name} " in capsys.readouterr().out
    args = gpu.argparse.Namespace(quick=True, resume=True, workers=2, seconds=9, limit=100, arch="90", rehearse=False,
                                  prebuilt=None)  # fmt: skip
    command = gpu.STEPS[name].command(args)
    paths = [gpu.ROOT / part for part in command if part.endswith(".py")]
    assert (paths or name == "ready") and all(path.exists() for path in paths), paths
    gpu.STEPS[name].environment(args)


def test_rows_of_a_profile():
    names = ["ID", "Process ID", "Kernel Name", *gpu.METRICS.values()]
    of = {"us": ("ns", "1,500"), "dram %": ("%", "61.5"), "sm %": ("%", "12"), "dram MB": ("byte", "2000000"),
          "registers": ("register/thread", "168"), "occupancy %": ("%", "n/a"), "blocks": ("", "132")}  # fmt: skip
    units = ["", "", "", *(of.get(name, ("", ""))[0] for name in gpu.METRICS)]
    kernels = ["kvc_pack_kernel", "kvc_attend_int8_128", "kvc_combine_kernel(kvc_call)", "kvc_pack_kernel",
               "kvc_write_kernel"]  # fmt: skip
    values = [of.get(name, ("", "0.25"))[1] for name in gpu.METRICS]
    lines = [[str(i), "7", kernel, *values] for i, kernel in enumerate(kernels)]
    table = "\n".join(",".join(f'"{x}"' for x in line) for line in [names, units, *lines])
    rows = gpu.ncu_rows(f"call int8\n==PROF== Profiling\ncall append\n{table}\n")
    assert [row["call"] for row in rows] == ["int8"] * 3 + ["append"] * 2
    assert rows[2]["kernel"] == "kvc_combine_kernel"
    want = {"us": 1.5, "dram %": 61.5, "sm %": 12, "dram MB": 2, "registers": 168, "occupancy %": None, "blocks": 132,
            "issue %": 0.25}  # fmt: skip
    assert {key: rows[1][key] for key in want} == want
    assert gpu.ncu_rows("==ERROR== no counters") == []

"""Runs and data by URL: what a store shows at any moment, and from which copy a run goes on."""

import fcntl
import functools
import hashlib
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.lib.run_folders import left_run, left_sweep
from tests.lib.run_support import go, in_use, overrides, run_line, shell, steps
from tests.lib.run_toys import Net
from trainer import train
from trainer.checkpoint.manifest import FileDigest, Manifest, dump, parse_manifest, verify_folder
from trainer.cli.compose import Composer
from trainer.cli.overrides import parse
from trainer.cli.remote import bring, sent
from trainer.core.errors import ConfigError, DataError, NoCheckpointError, Preempted, SaveError
from trainer.core.run_folder import RunFolder, hold
from trainer.core.urls import copies_folder, copy_of, url_of
from trainer.data.text import Text
from trainer.features.storage.sending import Sender
from trainer.features.storage.store import Store, StoreError

RUNS = "flaky://bucket/runs"
URL, SWEEP = f"{RUNS}/day/1-train", f"{RUNS}/multirun/day/1"
CHANGES = ("put_file", "pipe_file", "rm")


class Flaky(MemoryFileSystem):
    """A store in memory that refuses from its n-th change on, in its midst, or answers nothing."""

    protocol, store, pseudo_dirs = "flaky", {}, [""]
    changes_left, is_away, meanwhile = None, False, None

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("flaky://"))

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if Flaky.is_away and name in (*CHANGES, "find", "cat_file", "get_file", "exists"):
            raise ConnectionError("no network")
        if Flaky.meanwhile and name in ("put_file", "get_file"):
            # What another process does, while a file is on its way
            meanwhile, Flaky.meanwhile = Flaky.meanwhile, None
            meanwhile()
        return (lambda *a, **k: self.change(found, *a, **k)) if name in CHANGES else found

    def change(self, made, *args, **options):
        if Flaky.changes_left == 0:
            raise ConnectionError("refused")
        Flaky.changes_left = Flaky.changes_left and Flaky.changes_left - 1
        return made(*args, **options)


@pytest.fixture(autouse=True)
def store(cache, monkeypatch):
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    fresh = {"store": {}, "pseudo_dirs": [""], "is_away": False}
    for name, value in {**fresh, **dict.fromkeys(("changes_left", "meanwhile"))}.items():
        monkeypatch.setattr(Flaky, name, value)
    monkeypatch.setattr("trainer.features.storage.sending.SEND_POLL_S", 0.02)
    MemoryFileSystem.store.clear()
    return Flaky()


def left_checkpoint(run, step, content=b"weights"):
    """Write a checkpoint of one file by hand."""
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    digest = FileDigest(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    manifest = Manifest(step=step, files={"model.safetensors": digest}, parts={})
    (folder / "manifest.json").write_bytes(dump(manifest))
    return folder


def whole_steps(store):
    """The steps that a reader finds; each has all files of its manifest, as they were written."""
    steps = []
    for path in store.glob("/bucket/runs/day/1-train/checkpoints/*/manifest.json"):
        manifest = parse_manifest(store.cat_file(path))
        for name, digest in manifest.files.items():
            content = store.cat_file(f"{path.removesuffix('manifest.json')}{name}")
            assert hashlib.sha256(content).hexdigest() == digest.sha256
        steps.append(manifest.step)
    return steps


def test_a_run_is_in_the_store_is_listed_and_goes_on_on_another_machine(capsys):
    run = go("checkpoint.every=2 steps=4 outputs=memory://bucket/runs")
    url, files = url_of(run.folder), "checkpoints/step-00000004/*"
    written = {file.name: file.read_bytes() for file in run.folder.glob(files)}
    shutil.rmtree(copies_folder())
    capsys.readouterr()
    assert shell("ls outputs=memory://bucket/runs") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["completed", "4/4"]
    assert not [*copies_folder().rglob("*.safetensors")]
    bring(copy_of(url))
    assert {file.name: file.read_bytes() for file in run.folder.glob(files)} == written
    shutil.rmtree(copies_folder())
    resumed = train([f"resume={url}", "trust=[tests]", "steps=6"])
    assert resumed.folder == run.folder
    assert [entry["step"] for entry in steps(resumed)] == [*range(1, 7)]
    there = MemoryFileSystem().glob(f"{url.removeprefix('memory:/')}/checkpoints/*/manifest.json")
    assert [Path(each).parent.name for each in there] == ["step-00000004", "step-00000006"]
    status = json.loads(Store(url).read("status.json"))
    assert (status["state"], status["step"]) == ("completed", 6)


@pytest.mark.parametrize("url", ["s3://b/a", "file:///tmp/x", "local:///x", "hdfs://host/data"])
def test_a_url_is_read_back_from_the_name_of_its_copy(url):
    assert url_of(copy_of(url)) == url


def test_no_refusal_at_any_change_shows_a_manifest_without_its_files(store):
    copy, other = copy_of(URL), b"of a step that was taken again"
    for refused in itertools.count():
        shutil.rmtree(copy, ignore_errors=True)
        Flaky.store.clear()
        left_run(copy)
        left_checkpoint(copy, 2)
        left_checkpoint(copy, 4)
        sender = Sender(copy, Store(URL))
        assert not sender.send()
        assert whole_steps(store) == [2, 4]
        # One is pruned, one is new, and one is another than the store has.
        shutil.rmtree(copy / "checkpoints")
        left_checkpoint(copy, 4, other)
        left_checkpoint(copy, 6)
        sender._checkpoints.remove("checkpoints/step-00000004")
        Flaky.changes_left = refused
        fault = sender.send()
        found = whole_steps(store)
        Flaky.changes_left = None
        assert not sender.send(is_last=True)
        assert whole_steps(store) == [4, 6]
        assert (copy / ".sent").exists()
        if not fault:
            break
        assert fault == "ConnectionError: refused"
        assert found, "the older ones are there until a new one is whole"
    assert refused > 5


def test_the_end_of_a_run_says_what_the_store_lacks_and_the_next_start_sends_it(store, capsys):
    left_checkpoint(left_run(copy_of(URL)), 4)
    Flaky.is_away = True
    with (
        pytest.raises(SaveError, match=r"lacks the end of this run .*train resume=flaky"),
        sent(copy_of(URL)),
    ):
        pass
    assert capsys.readouterr().err.count("the run goes on") == 1
    assert not bring(copy_of(URL))
    assert "its copy on this machine is used" in capsys.readouterr().err
    assert verify_folder(copy_of(URL) / "checkpoints/step-00000004").step == 4
    Flaky.is_away = False
    with sent(copy_of(URL)):
        pass
    assert whole_steps(store) == [4]


def test_the_newest_intact_checkpoint_of_store_and_copy_is_what_a_run_goes_on_from():
    copy = left_run(copy_of(URL), status={"state": "failed", "step": 4})
    weights = left_checkpoint(copy, 4) / "model.safetensors"
    assert not Sender(copy, Store(URL)).send()
    theirs, ours = (copy / "status.json").read_text(), '{"state": "completed", "step": 5}'
    (copy / "status.json").write_text(ours)
    with in_use(copy):
        bring(copy)
    bring(copy)
    assert (copy / "status.json").read_text() == ours, "this machine could not send it"
    weights.write_bytes(b"torn")
    (copy / ".sent").touch()
    bring(copy)
    assert (copy / "status.json").read_text() == theirs
    assert verify_folder(weights.parent).step == 4
    # Half of a checkpoint, and an object that would stand outside of the folder
    Store(URL).put("checkpoints/step-00000006/model.safetensors", b"weights")
    Store(URL).put("../../../x", b"")
    (copy / ".sent").unlink()
    shutil.rmtree(copy / "checkpoints")
    bring(copy_of(RUNS), whole=False)
    assert [each.name for each in copy.glob("checkpoints/*")] == ["step-00000004"]
    assert not [*copies_folder().rglob("x")]
    Flaky.is_away = True
    with pytest.raises(NoCheckpointError, match="step 4 is in the store alone"):
        bring(copy)
    left_checkpoint(copy, 6)
    assert not bring(copy)
    assert RunFolder(copy).steps() == [6], "without its tensors it is none"


def test_no_run_begins_anew_while_the_store_does_not_answer():
    Flaky.is_away = True
    with pytest.raises(NoCheckpointError, match="the store is away; leave it out to begin a run"):
        go(f"outputs={RUNS} resume=auto")
    with pytest.raises(ConfigError, match="no network; nothing can be written there, so no run"):
        go(f"outputs={RUNS}")


def test_data_are_read_anew_where_they_changed_and_from_the_copy_without_a_network(store):
    url = "flaky://bucket/texts"
    for name, text in {"a.txt": "first\n", "b.txt": "second\n"}.items():
        Store(url).put(name, text.encode())
    bring(copy_of(url))
    assert len(Text(url, holdout=0.5)) == 1
    Store(url).remove("b.txt")
    Store(url).put("a.txt", b"first\n\nthird\n\nlast\n")
    bring(copy_of(url))
    assert [file.name for file in copy_of(url).iterdir()] == ["a.txt"]
    Flaky.is_away = True
    assert not bring(copy_of(url))
    assert "third" in (copy_of(url) / "a.txt").read_text()
    with pytest.raises(StoreError, match="ConnectionError: no network"):
        Store(url).objects()


def test_a_checkpoint_that_is_pruned_on_its_way_stays_in_the_store_until_a_newer_one_is_there(
    store,
):
    copy = left_run(copy_of(URL))
    left_checkpoint(copy, 2)
    sender = Sender(copy, Store(URL))
    for step in (4, 6):
        Flaky.meanwhile = lambda: shutil.rmtree(copy / "checkpoints")
        assert not sender.send()
        assert whole_steps(store) == [step - 2]
        left_checkpoint(copy, step)
    assert not sender.send(is_last=True)
    assert whole_steps(store) == [6]
    assert not [*copy.glob(".tmp-*")]


def test_a_process_that_reads_a_run_leaves_what_another_machine_trains(store):
    left_checkpoint(left_run(copy_of(URL)), 2)
    with sent(copy_of(URL)):
        pass
    theirs = Store(URL)
    for name in ("model.safetensors", "manifest.json"):
        file = left_checkpoint(Path("theirs") / name, 4) / name
        theirs.put(f"checkpoints/step-00000004/{name}", file)
    with sent(copy_of(URL)):
        (copy_of(URL) / "evaluate.json").write_text("{}")
    assert whole_steps(store) == [2, 4]
    assert theirs.read("evaluate.json") == b"{}"
    # What is pruned there stays so; a record that someone removed is sent again.
    theirs.remove("checkpoints/step-00000002")
    theirs.remove("status.json")
    with sent(copy_of(URL)):
        pass
    assert whole_steps(store) == [4]
    assert theirs.read("status.json")
    with in_use(copy_of(URL)), sent(copy_of(URL)):
        (copy_of(URL) / "evaluate.json").write_text('{"loss": 1}')
    assert theirs.read("evaluate.json") == b"{}", "who uses the run sends it"
    # One is pruned there while it is read here.
    shutil.rmtree(copies_folder())
    Flaky.meanwhile = lambda: [theirs.remove(f"checkpoints/step-0000000{step}") for step in (2, 4)]
    assert bring(copy_of(URL))
    assert RunFolder(copy_of(URL)).steps() == []


def test_a_store_that_refuses_is_one_line_before_any_step(monkeypatch):
    def refused(*_, **__):
        raise PermissionError(f"Access Denied to {'k' * 115} {secret} for this")

    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setattr(Flaky, "pipe_file", refused)
    with pytest.raises(
        ConfigError, match="nothing can be written there, so no run begins"
    ) as found:
        go(f"outputs={RUNS}")
    assert secret[:6] not in str(found.value)
    assert not [*copies_folder().rglob("config.yaml")]
    monkeypatch.setattr(Flaky, "find", refused)
    with pytest.raises(ConfigError, match="check the bucket's name and the credentials"):
        go(f"outputs={RUNS} resume=auto")


def test_records_of_any_class_of_data_are_read_by_url(store):
    Store("flaky://bucket/chat.jsonl").put("", b'{"text": "first"}\n')
    composer = Composer.of()
    with composer.open():
        words = ["data=hf", "data.path=flaky://bucket/chat.jsonl", "model=gpt_tiny"]
        composer.check(parse([*words, "tokenizer=bytes"])[0])
    assert copy_of("flaky://bucket/chat.jsonl").read_text() == '{"text": "first"}\n'


def test_a_job_that_goes_on_by_itself_and_was_not_sent_is_neither_overwritten_nor_forgotten(store):
    sweep, job = copy_of(SWEEP), copy_of(f"{SWEEP}/0")
    with sent(sweep):
        left_sweep(sweep, [], [])
        for each in (sweep, job, sweep / "1"):
            with hold(each):
                left_checkpoint(each, 4)
    bring(job)
    with ExitStack() as used:
        for each in (pytest.raises(SaveError, match="lacks the end"), sent(job), hold(job)):
            used.enter_context(each)
        Flaky.is_away = True
        left_checkpoint(job, 8)
        (job / "metrics.jsonl").write_text('{"step": 8}\n')
    Flaky.is_away = False
    for copy in (copy_of(RUNS), job, sweep):
        bring(copy, whole=copy == sweep)
        assert (job / "metrics.jsonl").read_text(), "it is here alone"
    # A command that reads the sweep sends it; the other job was sent, and is not sent again.
    Store(SWEEP).put("1/metrics.jsonl", b"of another machine")
    with sent(sweep):
        pass
    assert Store(SWEEP).read("0/checkpoints/step-00000008/manifest.json")
    assert Store(SWEEP).read("0/metrics.jsonl") == b'{"step": 8}\n'
    assert Store(SWEEP).read("1/metrics.jsonl") == b"of another machine"
    bring(sweep)
    assert (sweep / "1/metrics.jsonl").read_text() == "of another machine"


def test_what_a_killed_run_saved_before_it_was_sent_is_sent_by_the_next_start(store):
    copy = left_run(copy_of(URL))
    with sent(copy), hold(copy):
        left_checkpoint(copy, 4)
    for step in (8, 12):
        bring(copy)
        sender = Sender(copy, Store(URL))
        sender.begin()
        # A process that lists runs, before this one is in use on a new machine
        bring(copy_of(RUNS), whole=False)
        with hold(copy):
            left_checkpoint(copy, step)
        if step == 12:
            assert (copy / ".sent").exists()
            Flaky.is_away = True
            assert sender.send()
        Flaky.is_away = False
        bring(copy)
        with sent(copy):
            pass
        assert max(whole_steps(store)) == step
        shutil.rmtree(copy)


def test_data_above_runs_leave_them_and_their_sweeps_as_they_are():
    left_sweep(copy_of(SWEEP), [])
    for name in ("sweep.csv", ".lock", "journal.log", "0/notes.txt"):
        (copy_of(SWEEP) / name).touch()
    before = {*copy_of(SWEEP).rglob("*")}
    Store("flaky://bucket").put("a.txt", b"text\n")
    bring(copy_of("flaky://bucket"))
    assert {*copy_of(SWEEP).rglob("*")} == before
    # What looks like a run above the cache is none.
    (copies_folder().parent / "checkpoints").mkdir()
    Store("flaky://bucket").remove("a.txt")
    bring(copy_of("flaky://bucket"))
    assert not copy_of("flaky://bucket/a.txt").exists()


def test_a_journal_that_grows_while_it_is_sent_has_the_size_that_was_announced(store, monkeypatch):
    def put_file(source, target, **_):
        size = Path(source).stat().st_size
        with (copy / "metrics.jsonl").open("a") as journal:
            journal.write("{}\n")
        content = Path(source).read_bytes()
        if len(content) != size:
            raise ValueError(f"Content-Range: bytes 0-{len(content) - 1}/{size}")
        store.pipe_file(target, content)

    monkeypatch.setattr(Flaky, "put_file", staticmethod(put_file))
    copy = left_run(copy_of(URL))
    left_checkpoint(copy, 4)
    assert not Sender(copy, Store(URL)).send()
    assert whole_steps(store) == [4]


def test_a_preempted_run_that_was_not_sent_is_not_put_back_and_a_failure_keeps_its_code(capsys):
    copy = left_run(copy_of(URL))
    Flaky.is_away = True
    for error, code in ((Preempted("stopped"), 8), (DataError("a.csv"), 3)):
        with pytest.raises(type(error)) as found, sent(copy):
            raise error
        assert found.value.exit_code == code
        assert "lacks the end of this run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_crashed_and_was_not_sent_keeps_its_code(monkeypatch, capsys):
    forward = Net.forward

    @functools.wraps(forward)
    def torn(*words, **more):
        Flaky.is_away = bool([*copies_folder().rglob("manifest.json")])
        if Flaky.is_away:
            raise OSError("torn")
        return forward(*words, **more)

    monkeypatch.setattr(Net, "forward", torn)
    line = f"outputs={RUNS} trust=[tests] checkpoint.every=1"
    assert run_line(overrides(line)) == 1
    assert "lacks the end of this run" in capsys.readouterr().err


def test_who_waits_for_a_copy_says_what_is_brought(capsys):
    copies_folder().mkdir(parents=True)
    with (copies_folder() / ".lock").open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("s3://bucket/data")
        lock.flush()
        brought, shown = pool.submit(bring, copy_of(URL)), ""
        while not shown and not brought.done():
            shown = capsys.readouterr().err
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert brought.result()
    assert shown.endswith(f"{URL}: waits for another process, which brings s3://bucket/data\n")

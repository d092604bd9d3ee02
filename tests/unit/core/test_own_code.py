"""The user's code is found for what they consented to, and for no library."""

import importlib
import sys
from pathlib import Path

import pytest

from trainer.core.own_code import OwnCode


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnCode:
    """A folder of the user's, and a library elsewhere that looks for what is not installed."""
    folder, site = tmp_path / "here", tmp_path / "site"
    (folder / "own_package").mkdir(parents=True)
    site.mkdir()
    (folder / "own_a.py").write_text("import own_b\n\ndef late():\n    import own_package.c\n")
    (folder / "own_b.py").write_text("")
    (folder / "own_probed.py").write_text("raise RuntimeError('ran')\n")
    (folder / "own_package" / "__init__.py").write_text("")
    (folder / "own_package" / "c.py").write_text("from own_b import __name__ as name\n")
    (site / "own_library.py").write_text("def probe():\n    import own_probed\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    for name in [each for each in sys.modules if each.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    made = OwnCode()
    made.folder = folder
    return made


def test_the_folder_stands_last_once_a_class_is_found_nowhere_else(code):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("own_a")
    code.permit("own_library.Net")  # installed, so that its code is not the user's
    with pytest.raises(ModuleNotFoundError, match="own_probed"):
        importlib.import_module("own_library").probe()
    (code.folder / "own_library.py").write_text("raise RuntimeError('ran')\n")
    code.permit("own_a.Net")
    assert sys.path[-1] == str(code.folder)
    importlib.import_module("own_a").late()
    assert {"own_b", "own_package", "own_package.c"} <= sys.modules.keys()
    assert {"own_a", "own_b"} <= code.digests().keys()
    code.folder = Path(code.folder)  # the next command begins in the same
    code.permit("own_a.Net")
    assert sys.path.count(str(code.folder)) == 1
    code.folder = code.folder.parent
    assert sys.path[-1].endswith("site")
    code.folder = code.folder / "here"
    code.permit("own_a.Net")
    assert sys.path[-1] == str(code.folder), "again, although its module is imported"


def test_a_folder_that_python_searches_anyway_stays(code):
    sys.path.insert(0, str(code.folder))
    code.permit("own_a.Net")
    code.folder = code.folder.parent
    assert sys.path[0].endswith("here")


def test_the_file_of_a_package_is_known_before_it_is_imported(code):
    assert code.file_of("own_probed") == str(code.folder / "own_probed.py")
    assert code.file_of("own_package") == str(code.folder / "own_package" / "__init__.py")
    assert code.file_of("nothing") == ""
    assert "own_probed" not in sys.modules
    (code.folder.parent / "site" / "own_names").mkdir()
    assert code.file_of("own_names") == str(code.folder.parent / "site" / "own_names")
    (code.folder / "own_library.py").write_text("")
    assert code.file_of("own_library") == str(code.folder.parent / "site" / "own_library.py")

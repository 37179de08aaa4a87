"""What commands print where there is no terminal."""

from mmpack.cli.output import emit, table


def test_a_wide_table_is_one_line_per_row(capsys, monkeypatch):
    names = [f"column_{k:02d}" for k in range(20)]
    wide = table(names, [range(20), range(20)])
    monkeypatch.delenv("COLUMNS", raising=False)
    emit({}, [wide], as_json=False, out=None)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines if "0" in line] == [20, 20, 20]

    monkeypatch.setenv("COLUMNS", "40")  # who sets it gets it
    emit({}, [wide], as_json=False, out=None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40

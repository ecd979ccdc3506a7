"""What a run leaves behind if nobody is left to remove it, the next one removes."""

from pathlib import Path

from rankwise.launch.run.private_places import OF_ETCD, OF_RUN, held_folder, remove_abandoned


def test_folders_that_nobody_holds_are_removed_by_the_next_run(tmp_path: Path) -> None:
    abandoned = [tmp_path / "rankwise_1" / OF_ETCD / "data", tmp_path / "rankwise_2" / OF_RUN]
    kept = [tmp_path / "rankwise_logs" / "none_1a2b", tmp_path / "of_others" / OF_ETCD]
    for each in (*abandoned, *kept):
        each.mkdir(parents=True)

    with (
        held_folder(str(tmp_path / "rankwise_first"), OF_RUN) as first,
        held_folder(str(tmp_path / "rankwise_second"), OF_ETCD) as second,
    ):
        remove_abandoned(str(tmp_path / "rankwise_first"))
        assert Path(first).is_dir()
        assert Path(second).is_dir()

    assert not any(each.exists() for each in abandoned)
    assert all(each.is_dir() for each in kept)

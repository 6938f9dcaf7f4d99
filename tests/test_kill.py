"""A killed run that is resumed ends where one left alone does, bit for bit. `benchmarks/kill.py` kills more often."""

from benchmarks.kill import race


def test_kills_in_the_optimiser_in_writing_and_in_completing_a_checkpoint_change_nothing(tmp_path):
    result = race(tmp_path, 3, ranks=1, zero_stage=0, phases=("optimizer", "write_model", "commit"))
    assert result["phases"] == {"optimizer": 1, "write_model": 1, "commit": 1}
    assert result["mismatches"] == 0
    assert result["weight_change"] > 1e-4

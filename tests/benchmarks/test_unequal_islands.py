"""The arithmetic of the benchmark of unequal islands."""


def test_ratios_are_of_runs_next_to_each_other_and_the_ideal_is_what_all_compute_together(script):
    benchmark = script("unequal_islands")
    result = benchmark.Result
    # 16 rows a second and 8, which take 16 / 8 seconds with equal shares; the ideal is 32 / 24
    equal, auto = result(2.0, 24.0, [16, 16], [], 2.5), result(1.4, 25.6, [21, 11], [10], 2.5)
    found = {benchmark.EQUAL: [equal] * 2, benchmark.AUTO: [auto, equal]}
    text = benchmark.table(32, found)
    assert "| --shares auto | 1.4000 | 21, 11 | 10 | 2.50000 |" in text
    assert "equal shares / auto: 1.21 (1.43, 1.00)" in text
    assert "auto / ideal: 1.27 (1.05, 1.50)" in text

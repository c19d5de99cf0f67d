from qerl.algo.batches import batches


def test_items_stay_in_order_and_only_a_larger_item_exceeds_the_limit():
    found = list(batches(["aa", "b", "c", "dddddd", "ee", "ff"], len, 4))
    assert found == [["aa", "b", "c"], ["dddddd"], ["ee", "ff"]]
    assert list(batches([], len, 4)) == []

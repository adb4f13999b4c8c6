from spd_lightning.data.debug_dialogues import DEBUG_DIALOGUES, NUM_DIALOGUES
from spd_lightning.data.sources import Source, iter_rows


def test_every_row_is_a_usable_dialogue_and_the_same_again():
    first, second = ([(row.location, row.item) for row in iter_rows(Source(DEBUG_DIALOGUES))] for _ in range(2))
    assert first == second and len(first) == NUM_DIALOGUES
    assert all(item is not None for _, item in first)

"""A few texts of one word to more than two hundred, so that a check needs no file."""

from __future__ import annotations

_LONG = (
    "The lighthouse keeper wrote his log by hand for thirty-one years, and in all that time he skipped "
    "only two days: the night the gallery windows blew in, and the morning after. He noted the wind, the "
    "height of the sea at the foot of the rock, the ships that passed and the ones that did not, and what "
    "the oil had cost since the last boat. Nobody asked him for most of it. When the light was finally "
    "given to a machine, the commission sent a clerk to fetch the books, forty-four volumes in oilcloth, "
    "and the clerk, who had meant to leave by the evening tide, stayed for a week to read them. He found "
    "that the storms came in groups of three more often than chance would have it, that the price of oil "
    "followed the price of rope, and that the keeper had begun, somewhere in the ninth volume, to write "
    "down the first bird he saw each spring. It was nearly always a wheatear. In the last volume the date "
    "had moved by eleven days. The clerk copied these lines into a letter to a friend at the university, "
    "who put them into a table, and the table is still used, although the lighthouse has been a hotel "
    "for longer than it was ever a lighthouse and no one at the front desk could tell you the name of "
    "the man who climbed those stairs, a hundred and ninety-six of them, every evening of his life."
)

SAMPLE_TEXTS: tuple[str, ...] = (
    "Yes",
    "Thunderstorm",
    "Open the window.",
    "Where does this train go?",
    "The battery lasts about two days.",
    "A man is playing a guitar on the street.",
    "Someone plays an instrument outdoors for the people passing by.",
    "Returned it after a week: the zip broke and nobody answered my mails.",
    "naïve café, Zürich, Ærøskøbing, 東京, Ελλάδα, Привет - and an emoji or two 🚀",
    "Please restart the router, wait for thirty seconds, and tell me whether the second light is green.",
    "x = [f(i) for i in range(10) if i % 2]  # code is text as well, with () and {} and _names_",
    "Invoice no. 2024-00317, 14 items, 1,299.00 EUR incl. 19 % VAT, due within 30 days of receipt.",
    (
        "Photosynthesis turns light into chemical energy. Plants take in carbon dioxide and water, and with the "
        "energy of the light they build sugar and set oxygen free."
    ),
    (
        "I bought this kettle because the old one took for ever. It boils a litre in under three minutes, the "
        "handle stays cool, and the lid opens with one finger. The only thing I would change is the beep, which "
        "wakes the dog, and which cannot be switched off without opening the base."
    ),
    _LONG[: _LONG.index("Nobody asked")],
    _LONG[: _LONG.index("The clerk copied")],
    _LONG,
)

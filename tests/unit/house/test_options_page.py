"""The page of the settings is made from their rows."""

from options_page import PAGE, page


def test_the_page_is_what_the_rows_say() -> None:
    """A row that is changed without the page fails here."""
    assert PAGE.read_text() == page()

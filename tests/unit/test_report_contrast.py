"""Every page by day and by night: text has 4.5:1 to what is behind it and marks 3:1, whatever is opened."""

import pytest

pytestmark = pytest.mark.slow

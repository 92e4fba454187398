"""Python imports this before any program: from here on the process runs on a Mac."""

from tests.as_mac import mac

mac.play()

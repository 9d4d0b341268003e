"""The page /ui: engines and conversations, live, for the people who run kvlease."""

from kvlease.router.ui.routes import Ui, off_because

__all__ = ["Ui", "off_because"]

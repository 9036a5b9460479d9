"""tad: fast and accurate decoding for diffusion language models.

Importing it registers LLaDA and Dream with the Hugging Face Auto classes.
"""

from tad.errors import TadError
from tad.models import LM, load

__version__ = "0.1.0"
__all__ = ["LM", "TadError", "__version__", "load"]

"""Pictures of a canvas, coloured by the forward that revealed each token: in a terminal, as SVG, as HTML for notebooks.

They draw what decoding has told them and decide nothing.
"""

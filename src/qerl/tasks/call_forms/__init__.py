"""Forms in which the families of models write tool calls; one file each, `choice.py` chooses.

form.py       what a form is, and JSON values in a text that grows
"""

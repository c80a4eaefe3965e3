"""``python -m paceline`` is the program ``paceline``."""

import os
import sys

from paceline import program

path = program()
os.execv(path, [path, *sys.argv[1:]])

"""The fault matrix: sessions of real processes, in each of which something breaks at one moment.

matrix    which cells there are: a phase, a fault, a victim, a transport
model     tensors whose bytes tell their version
rank      one process: a first refit, the fault in the next one, and refits until the session has recovered
inject    how a process breaks, and where
cell      runs one cell, and notes what every process saw
verdicts  judges what they saw
"""

"""Whole training steps of models of real shapes with random weights: timed beside peers; in every layout, by stage"""

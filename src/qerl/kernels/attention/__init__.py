"""Attention over packed rows, trees and paged caches; rotation and norms of heads."""

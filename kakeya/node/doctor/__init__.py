"""`kakeya doctor`: facts are collected by thin shells, judged by pure checks, shown as lines."""

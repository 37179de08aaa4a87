"""Operators on [T] packed rows and [N] loss tokens; one public function a file."""

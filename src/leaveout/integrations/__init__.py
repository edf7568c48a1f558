"""One line in the trainers that people use; each module needs only its own framework."""

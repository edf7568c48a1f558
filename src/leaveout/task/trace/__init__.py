"""Operations recorded once per shape and repeated without Python: the tracer and its passes."""

"""How kernels run: which are chosen, compiling, threads, vectors. Families of kernels stand on it."""

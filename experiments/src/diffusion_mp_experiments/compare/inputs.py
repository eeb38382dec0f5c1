def read(source, *, target=None, task=None, edges=None, identifier=None):
    return source

"""The operations as functions of tensors: one folder per operation, with the ways to do it; no grid, no cell, no harness.

A folder's ``__init__`` holds the *problem* of its operation: a frozen dataclass of everything but the tensors that decides
how a kernel is built (sizes, formats, routing rule). Every other module of the folder that a table names is an
implementation, or has several as entries (``module:entry``, whose functions end in ``_entry``), and offers

- ``bind(problem, *, <tensor>=..., ..., <option>=...) -> Callable``: takes the input and output tensors by name, compiles and
  allocates what it needs, and returns the call that does the work. The call takes no argument, writes every element of the
  outputs and changes no input. Outputs that an implementation allocates itself are returned by the call, by name;
- ``unsupported(problem, target, *, <option>=...) -> str | None``, optional: why it cannot run this problem on a `target.Target` (None: on
  any); a module whose answer does not depend on the target leaves that parameter out;
- ``precompile(problem, arch, *, <option>=...)``, where a kernel cache is used: compiles for an architecture without a GPU.

`moe_routing_kernels.ops` offers the same kernels to models; `moe_routing_bench.benches` measures them.
"""

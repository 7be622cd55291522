"""Operator profiles of measured layers, where the config asks for them."""


rule profile:
    input:
        cell="results/{platform}/cells/layer/{cell}.parquet",
        code=project_files.source("measure/profiling.py"),
    output:
        directory("results/{platform}/profiles/{cell}"),
    log:
        "results/{platform}/logs/profiles/{cell}.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=1,  # it has the GPU to itself, as a measurement has
    params:
        client=project_files.source("measure/client.py"),
    message:
        "profile {wildcards.cell}"
    shell:
        "python -I -S {params.client:q} --module moe_routing_bench.cli profile {input.cell:q} --out {output:q} >{log:q} 2>&1"

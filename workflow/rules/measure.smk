"""One job a cell, then all rows in one file."""

MEASURE = f"{CLIENT} {{output:q}} {{params.spec:q}} {PLATFORM} >{{log:q}} 2>&1"


rule measure:
    input:
        code=code_of,
    output:
        f"{paths.results(PLATFORM)}/cells/{{bench}}/{{cell}}.parquet",
    log:
        f"{paths.results(PLATFORM)}/logs/{{bench}}/{{cell}}.log",
    conda:
        "../../environment.yml"
    threads: THREADS
    resources:
        gpu=1,  # one measurement at a time, on a CPU as well
    params:
        spec=spec_of,
    message:
        "measure {wildcards.bench} {wildcards.cell}"
    shell:
        MEASURE


rule measure_again:
    input:
        cells=lambda _: cell_files(),
        asked=kept(paths.asked(PLATFORM)),
        code=[project_files.source("comparison/anomalies.py"), project_files.source("cli/measure.py")],
    output:
        "results/{platform}/again.parquet",
    log:
        "results/{platform}/logs/again.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=1,
    params:
        client=project_files.source("measure/client.py"),
        config=CONFIG_JSON,
    message:
        "once more: the cells of times in doubt"
    shell:
        "python -I -S {params.client:q} --running --module moe_routing_bench.cli measure-again --platform {wildcards.platform} --config-json {params.config:q}"
        " --out {output:q} >{log:q} 2>&1"


rule collect:
    input:
        again=str(paths.again(PLATFORM)),  # which is made anew when a cell is
        asked=kept(paths.asked(PLATFORM)),
        code=project_files.sources("comparison")
        + [
            project_files.source(f"{name}.py")
            for name in (
                "store/cell_files",
                "store/records",
                "store/rows",
                "store/parquet",
                "config/axes",
                "config/expand",
            )
        ],
        columns=project_files.source("store/columns.yaml"),
    output:
        "results/{platform}/measurements.parquet",
    log:
        "results/{platform}/logs/collect.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        client=project_files.source("measure/client.py"),
        config=CONFIG_JSON,
    message:
        "collect {output}"
    shell:
        "python -I -S {params.client:q} --running --module moe_routing_bench.cli collect --platform {wildcards.platform} --config-json {params.config:q}"
        " --out {output:q} >{log:q} 2>&1"

"""One job an adaptation of a trained run, pilots of the learning rate first; then all rows in one file."""


rule adapt:
    input:
        code=kept(paths.code(PLATFORM, "perft")),
        base=lambda wildcards: str(paths.run_file(wildcards.platform, TRAINING.all_adaptations[wildcards.run].base)),
        pilots=perft_pilots_of,
    output:
        "results/{platform}/perft/{run}.parquet",
    log:
        "results/{platform}/logs/perft/{run}.log",
    priority: 1  # before timings, which wait until no run has the GPU
    conda:
        "../../environment.yml"
    threads: 1
    params:
        client=project_files.source("measure/client.py"),
        spec=lambda wildcards: TRAINING.all_adaptations[wildcards.run].spec,
        pilots=lambda wildcards: [word for path in perft_pilots_of(wildcards) for word in ("--pilot", path)],
    message:
        "adapt {wildcards.run}"
    shell:
        "python -I -S {params.client:q} --module moe_routing_bench.cli adapt {input.base:q} --spec {params.spec:q} {params.pilots:q} --threads {threads}"
        " --out {output:q} --platform {wildcards.platform:q} >{log:q} 2>&1"


if TRAINING.adaptations:  # else stored rows are a source like any other

    rule collect_perft:
        input:
            runs=[str(path) for path in TRAINING.adaptation_files(PLATFORM)],
            code=[
                project_files.source("quality/run_rows.py"),
                project_files.source("quality/plan.py"),
                project_files.source("quality/perft_summary.py"),
            ],
        output:
            "results/{platform}/perft.parquet",
        log:
            "results/{platform}/logs/collect_perft.log",
        localrule: True
        conda:
            "../../environment.yml"
        params:
            client=project_files.source("measure/client.py"),
            config=CONFIG_JSON,
        message:
            "collect {output}"
        shell:
            "python -I -S {params.client:q} --running --module moe_routing_bench.cli collect-perft --config-json {params.config:q} --out {output:q} >{log:q} 2>&1"

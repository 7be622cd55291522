"""The text of packages, if a run reads it; one job a training run, pilots of the learning rate first; then times with the GPU alone; then all rows in one file."""


rule prepare_texts:
    output:
        PACKAGES_MANIFEST,
    log:
        f"results/{PLATFORM}/logs/prepare_texts.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        client=project_files.source("measure/client.py"),
        vocabulary=max((run.vocabulary for run in TRAINING.runs.values()), default=256),
    message:
        "fetch and clean the text of packages"
    shell:
        "python -I -S {params.client:q} --running --module moe_routing_bench.cli prepare-texts --vocabulary {params.vocabulary} >{log:q} 2>&1"


rule train:
    input:
        code=kept(paths.code(PLATFORM, "quality")),
        pilots=pilots_of,
        texts=texts_of,
    output:
        "results/{platform}/runs/{run}.parquet",
    log:
        "results/{platform}/logs/runs/{run}.log",
    priority: 1  # before timings, which wait until no run has the GPU
    conda:
        "../../environment.yml"
    threads: 1
    params:
        client=project_files.source("measure/client.py"),
        spec=lambda wildcards: TRAINING.runs[wildcards.run].spec,
        pilots=lambda wildcards: [word for path in pilots_of(wildcards) for word in ("--pilot", path)],
    message:
        "train {wildcards.run}"
    shell:
        "python -I -S {params.client:q} --module moe_routing_bench.cli train --spec {params.spec:q} {params.pilots:q} --threads {threads} --out {output:q} --platform {wildcards.platform:q}"
        " >{log:q} 2>&1"


rule time_training:
    input:
        "results/{platform}/runs/{run}.parquet",
    output:
        "results/{platform}/timing/{run}.parquet",
    log:
        "results/{platform}/logs/timing/{run}.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=1,  # training runs share a GPU, a timing has it alone
    params:
        client=project_files.source("measure/client.py"),
    message:
        "time {wildcards.run}"
    shell:
        "python -I -S {params.client:q} --module moe_routing_bench.cli time-training {input:q} --threads {threads} --out {output:q} --platform {wildcards.platform:q} >{log:q} 2>&1"


if TRAINING.finals:  # else stored rows are a source like any other

    rule collect_quality:
        input:
            runs=[str(path) for path in TRAINING.files(PLATFORM)],
            timing=[str(path) for path in TRAINING.timing_files(PLATFORM)],
            code=[
                project_files.source("quality/run_rows.py"),
                project_files.source("store/parquet.py"),
                project_files.source("quality/plan.py"),
                project_files.source("quality/compare.py"),
                project_files.source("quality/family.py"),
            ],
        output:
            "results/{platform}/quality.parquet",
        log:
            "results/{platform}/logs/collect_quality.log",
        localrule: True
        conda:
            "../../environment.yml"
        params:
            client=project_files.source("measure/client.py"),
            config=CONFIG_JSON,
        message:
            "collect {output}"
        shell:
            "python -I -S {params.client:q} --running --module moe_routing_bench.cli collect-quality --config-json {params.config:q} --out {output:q} >{log:q} 2>&1"

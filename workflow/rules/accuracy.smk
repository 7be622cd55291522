"""The accuracy of quantised weights, where the config asks for it."""


rule accuracy:
    input:
        code=kept(paths.code(PLATFORM, "experts")),
        own=[project_files.source("measure/accuracy.py"), project_files.source("cli/accuracy.py")],
    output:
        "results/{platform}/accuracy.parquet",
    log:
        "results/{platform}/logs/accuracy.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=1,
    params:
        client=project_files.source("measure/client.py"),
    message:
        "accuracy of quantised weights"
    shell:
        "python -I -S {params.client:q} --module moe_routing_bench.cli accuracy --out {output:q} >{log:q} 2>&1"

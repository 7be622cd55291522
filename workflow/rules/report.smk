"""The report: as data, and as the HTML page that is rendered from it."""


rule html:
    input:
        rows=[f"results/{{platform}}/{source}.parquet" for source in sorted(SOURCES)],
        profiles=profiles_of,
        accuracy=accuracy_of,
        figures=[f"reports/{{platform}}/figures/{name}.svg" for name in REPORTED],
        code=sorted({*project_files.drawn_with("report.render"), *project_files.sources("figures")}),
        templates=project_files.sources("report", suffixes=(".css", ".js", ".j2", ".yaml", ".txt")),
        claims=str(own_or_shipped(paths.CLAIMS)),
        published=project_files.named(path.resolve() for path in shipped(paths.PUBLISHED).iterdir()),
        captions=project_files.sources("figures", suffixes=(".yaml",)),
        choices=project_files.source("choices/choices.json", of=KERNELS),
    output:
        page="reports/{platform}/index.html",
        data="reports/{platform}/report.json",
    log:
        "results/{platform}/logs/report.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        client=project_files.source("measure/client.py"),
    message:
        "report {output.page}"
    shell:
        "python -I -S {params.client:q} --running --module moe_routing_bench.cli report --platform {wildcards.platform} >{log:q} 2>&1"

"""The report: as data, and as the HTML page that is rendered from it."""


rule html:
    input:
        rows=[f"results/{{platform}}/{source}.parquet" for source in sorted(SOURCES)],
        profiles=profiles_of,
        accuracy=accuracy_of,
        figures=[f"reports/{{platform}}/figures/{name}.svg" for name in REPORTED],
        code=sorted({*sources.drawn_with("report.render"), *sources.sources("figures")}),
        templates=sources.sources("report", suffixes=(".css", ".js", ".j2", ".yaml", ".txt")),
        claims=str(own_or_shipped(paths.CLAIMS)),
        published=sources.named(path.resolve() for path in shipped(paths.PUBLISHED).iterdir()),
        captions=sources.sources("figures", suffixes=(".yaml",)),
        choices=sources.source("choices/choices.json", of=KERNELS),
    output:
        page="reports/{platform}/index.html",
        data="reports/{platform}/report.json",
    log:
        "results/{platform}/logs/report.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        client=sources.source("measure/client.py"),
    message:
        "report {output.page}"
    shell:
        "python -I -S {params.client:q} --running --module moe_routing_bench.cli report --platform {wildcards.platform} >{log:q} 2>&1"

"""The HTML report."""


rule html:
    input:
        rows=[f"results/{{platform}}/{source}.parquet" for source in sorted(SOURCES)],
        figures=[f"reports/{{platform}}/figures/{name}.svg" for name in REPORTED],
        code=paths.sources("report", suffixes=(".py", ".html", ".css", ".js", ".j2", ".md")),
    output:
        "reports/{platform}/index.html",
    log:
        "results/{platform}/logs/report.log",
    conda:
        "../../environment.yml"
    params:
        client=paths.source("measure/client.py"),
    message:
        "report {output}"
    shell:
        "python -I -S {params.client:q} --running --cli report --platform {wildcards.platform} >{log:q} 2>&1"

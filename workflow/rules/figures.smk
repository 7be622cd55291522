"""One rule a figure: editing one figure's module draws that figure again."""

STYLES = {"measurements": ["style"], "quality": ["style", "quality_style"]}

for figure in FIGURES.values():

    rule:
        name:
            f"figure_{figure.name}"
        input:
            rows=f"results/{{platform}}/{figure.source}.parquet",
            code=[paths.source(f"figures/{name}.py") for name in (*STYLES[figure.source], figure.module.lstrip("."))],
        output:
            svg=report(
                f"reports/{{platform}}/figures/{figure.name}.svg",
                caption="../report/figure.rst",
                category="Figures",
                labels={"figure": figure.title},
            ),
            png=f"reports/{{platform}}/figures/{figure.name}.png",
        log:
            f"results/{{platform}}/logs/figures/{figure.name}.log",
        conda:
            "../../environment.yml"
        params:
            figure={"name": figure.name, "title": figure.title, "caption": figure.caption},
        message:
            "draw {output.svg}"
        shell:
            "python -m moe_routing_bench.cli figure --platform {wildcards.platform} --name {params.figure[name]:q} >{log:q} 2>&1"

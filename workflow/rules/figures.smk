"""One rule a figure: editing one figure's module draws that figure again."""

from moe_routing_bench.figures import FIGURES

for figure in FIGURES.values():

    rule:
        name:
            f"figure_{figure.name}"
        input:
            measurements="results/{platform}/measurements.parquet",
            code=[paths.source("figures/style.py"), paths.source(f"figures/{figure.module.lstrip('.')}.py")],
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

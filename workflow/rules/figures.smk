"""One rule per figure: editing one figure's module draws that figure again."""

for figure in FIGURES.values():

    rule:
        name:
            f"figure_{figure.name}"
        input:
            rows=f"results/{{platform}}/{figure.source}.parquet",
            code=sorted(
                {*project_files.drawn_with(f"figures.{figure.file}"), *project_files.drawn_with("figures.paper")}
            ),
            palette=project_files.source("figures/palette.yaml"),
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
        localrule: True
        conda:
            "../../environment.yml"
        params:
            client=project_files.source("measure/client.py"),
            figure={"name": figure.name, "title": figure.title, "caption": figure.caption},
        message:
            "draw {output.svg}"
        shell:
            "python -I -S {params.client:q} --running --module moe_routing_bench.cli figure --platform {wildcards.platform} --name {params.figure[name]:q}"
            " >{log:q} 2>&1"

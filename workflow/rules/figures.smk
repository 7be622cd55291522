"""One rule per figure: editing one figure's module draws that figure again."""

ON_PAPER = project_files.drawn_with("figures.paper")
DRAWN_WITH = {
    file: sorted({*project_files.drawn_with(f"figures.{file}"), *ON_PAPER})
    for file in {figure.file for figure in FIGURES.values()}
}

for figure in FIGURES.values():

    rule:
        name:
            f"figure_{figure.name}"
        input:
            rows=f"results/{PLATFORM}/{figure.source}.parquet",
            code=DRAWN_WITH[figure.file],
            palette=project_files.source("figures/palette.yaml"),
        output:
            svg=report(
                f"reports/{PLATFORM}/figures/{figure.name}.svg",
                caption="../report/figure.rst",
                category="Figures",
                labels={"figure": figure.title},
            ),
            png=f"reports/{PLATFORM}/figures/{figure.name}.png",
        log:
            f"results/{PLATFORM}/logs/figures/{figure.name}.log",
        localrule: True
        conda:
            "../../environment.yml"
        params:
            client=project_files.source("measure/client.py"),
            figure={"name": figure.name, "title": figure.title, "caption": figure.caption},
        message:
            "draw {output.svg}"
        shell:
            "python -I -S {params.client:q} --running --module moe_routing_bench.cli figure --platform "
            + PLATFORM
            + " --name {params.figure[name]:q} >{log:q} 2>&1"

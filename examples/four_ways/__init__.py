"""One shop, one set of tasks and call sites, run four ways. SHOP_WAY and SHOP_URL say which; nothing else differs.

    SHOP_WAY=celery SHOP_URL=redis://localhost                 celery -A examples.four_ways.app worker -Q orders,labels
    SHOP_WAY=celery SHOP_URL=dbqueue+postgresql://shop@db/shop celery -A examples.four_ways.app worker -Q orders,labels
    SHOP_WAY=celery SHOP_URL=dbqueue+postgresql://shop@db/shop dbqueue worker -A examples.four_ways.app -Q orders,labels
    SHOP_WAY=bridge SHOP_URL=postgresql://shop@db/shop         dbqueue worker -A examples.four_ways.app -Q orders,labels

RabbitMQ keeps no results: with amqp://... as SHOP_URL, SHOP_RESULTS says where they are. In each of the four ways
``python -m examples.four_ways.shop 1 2 3`` places three orders, and the tasks write the same rows into the file that SHOP_FILE names.
``python -m examples.four_ways.report 1 2 3`` waits for a chord's result, which the last way does not have.
"""
